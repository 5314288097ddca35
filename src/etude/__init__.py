"""Étude: train, serve and measure a coding agent. Nothing is imported here, so that every room stays light."""

__version__ = "0.1.0"
