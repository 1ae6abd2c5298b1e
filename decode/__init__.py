"""The lossless decoder: choose, propose, score, verify, advance, learn."""
