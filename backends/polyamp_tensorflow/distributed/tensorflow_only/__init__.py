"""Parts of this room that only TensorFlow needs: the step that polyamp itself runs on all replicas."""
