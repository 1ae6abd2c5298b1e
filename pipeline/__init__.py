"""Stages, files, time and tracking: the only room that knows Hydra and W&B."""
