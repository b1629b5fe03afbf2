"""Writes and reads run directories."""
