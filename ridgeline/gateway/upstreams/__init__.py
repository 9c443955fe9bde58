"""Where answers come from: upstreams, their credentials, and what is retried at which of them."""
