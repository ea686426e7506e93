"""One module a group of endpoints; `http.ROUTES` lists them."""
