"""Floor 3: the inference engine, its protocol, server and clients. Heavy imports stay in `engine` and `server`."""
