"""Wire protocols: parse a request body into a CompletionRequest, format events back."""
