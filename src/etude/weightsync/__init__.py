"""Weight sync: a chain of exact deltas and anchors through an object store (DESIGN decisions 7 and 8)."""
