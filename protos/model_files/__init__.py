"""Reading a model's files as files of strangers: only regular files, and every count, length and id against the file's
size and a limit before anything is built of it. Needs no torch, so that a launcher can check before it starts a rank.
"""
