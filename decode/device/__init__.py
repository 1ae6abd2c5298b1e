"""Whole steps on the device: draft, score, verify and roll back without the host waiting."""
