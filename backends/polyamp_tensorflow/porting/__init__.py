"""Transfer of models to and from other frameworks: `polyamp_keras.porting`, with TensorFlow's part."""
