"""Logs, metrics, traces, and the request record that they share."""
