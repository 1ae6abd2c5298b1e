"""Things that guess; one file per kind."""
