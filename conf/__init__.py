"""YAML only: names classes and holds every value."""
