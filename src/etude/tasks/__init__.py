"""Floor 5: repair tasks from real code, as Harbor folders, and the corpora that the starter policy learns from."""
