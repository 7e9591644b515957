"""Run the plain model: context, masks, cached keys and values, generation and sampling."""
