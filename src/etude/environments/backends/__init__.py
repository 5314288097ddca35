"""One module per way of making a pod; each offers `etude.environments.pod.PodBackend`."""
