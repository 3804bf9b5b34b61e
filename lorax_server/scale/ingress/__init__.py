"""The one address of all replicas: requests go to a replica and come back byte by byte."""
