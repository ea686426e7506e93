"""One module a group of endpoints; `application.ROUTES` lists them."""
