"""The only file access for reading."""
