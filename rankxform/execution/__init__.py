"""The only file access: finding files, reading ranges, writing streams, publishing."""
