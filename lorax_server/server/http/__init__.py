"""The HTTP infrastructure that the routes use: connections, middleware, server-sent events and error responses."""
