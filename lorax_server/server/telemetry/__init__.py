"""Logs, metrics and traces, and the request record that they share."""
