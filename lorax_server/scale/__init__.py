"""Runs replicas of the server on Ray Serve, with adapter affinity, autoscaling and shared adapter changes."""
