"""One generation: its tokens become text, and stop rules end it."""
