"""Other people's libraries, each optional and each thin: predictors and data named by a string, engines to run them."""
