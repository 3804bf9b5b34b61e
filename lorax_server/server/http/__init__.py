"""HTTP infrastructure below the routes: connections, middleware, server-sent events, error responses."""
