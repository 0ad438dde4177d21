"""The asynchronous shell: performs what the core decides, over the ports."""
