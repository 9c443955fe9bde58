"""The console: one web page over a server, a gateway or a fleet.

Its files are served from memory, without a build step. The packages that serve it give it their data; this
package knows none of them.
"""
