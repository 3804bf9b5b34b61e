"""One file per dataflow. An architecture that differs from another in an ingredient is a subclass of it."""
