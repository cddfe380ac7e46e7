"""Files read: found, indexed, compared and measured. The only file access for reading."""
