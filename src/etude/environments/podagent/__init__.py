"""What runs inside a pod. Standard library only, few imports: it is PID 1 of every pod and its start is paid each time."""
