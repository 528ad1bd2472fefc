"""A stage with `sync_param { method: ASYNC }`: replicas take iterations, pull weights and push gradients; servers update at each push."""
