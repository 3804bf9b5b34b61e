"""Telemetry: logs, metrics, traces, and the record of a request that they share."""
