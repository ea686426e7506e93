"""The routes, one module for each group of endpoints; `http.ROUTES` lists them."""
