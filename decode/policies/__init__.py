"""Policies: what chooses an arm for every step."""
