"""A wing: gradients in fewer bytes (`compress_param`) and workers that meet now and then or never (`sync_param`)."""
