"""Destination folders: locked, journalled, resumed and completed."""
