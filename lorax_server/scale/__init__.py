"""Replicas of the whole server on Ray Serve, and the router that sends each request where its adapter is."""
