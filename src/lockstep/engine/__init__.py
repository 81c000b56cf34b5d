"""How one step runs on N replicas. Knows TensorFlow; knows nothing of training runs, observation or planning."""
