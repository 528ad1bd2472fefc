"""A stage with `sync_param { method: ASYNC }`: replicas take iterations, pull weights and push gradients; a server updates them at each push."""
