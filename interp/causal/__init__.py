"""What a model does when values inside it are changed."""
