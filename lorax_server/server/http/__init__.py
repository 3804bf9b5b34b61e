"""HTTP below the routes: connections, middleware, events, errors."""
