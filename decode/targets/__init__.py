"""Target backends behind one interface."""
