"""Clients that work through a broker over HTTP instead of opening the log in their own process."""
