package nbd

import (
	"fmt"
	"net"
	"net/url"
	"strings"
)

// An Address says where an export is.
type Address struct {
	Network string // "tcp" or "unix"
	Addr    string // host:port or path
	Export  string // empty: the server's default
}

// ParseURI understands nbd://HOST[:PORT]/EXPORT and nbd+unix:///EXPORT?socket=PATH, see doc/uri.md of the protocol.
func ParseURI(uri string) (Address, error) {
	u, err := url.Parse(uri)
	if err != nil {
		return Address{}, fmt.Errorf("nbd: %w", err)
	}
	a := Address{Export: strings.TrimPrefix(u.Path, "/")}
	switch u.Scheme {
	case "nbd":
		port := u.Port()
		if port == "" {
			port = "10809"
		}
		a.Network, a.Addr = "tcp", net.JoinHostPort(u.Hostname(), port)
	case "nbd+unix":
		a.Network, a.Addr = "unix", u.Query().Get("socket")
		if a.Addr == "" {
			return Address{}, fmt.Errorf("nbd: URI %q: socket=PATH is missing", uri)
		}
	case "nbds", "nbds+unix":
		return Address{}, fmt.Errorf("nbd: URI %q: TLS is not supported", uri)
	default:
		return Address{}, fmt.Errorf("nbd: URI %q: want nbd:// or nbd+unix://", uri)
	}
	if len(a.Export) > maxNameLen {
		return Address{}, fmt.Errorf("nbd: URI: the export's name is longer than %d bytes", maxNameLen)
	}
	return a, nil
}

// String returns the URI.
func (a Address) String() string {
	u := url.URL{Scheme: "nbd", Host: a.Addr, Path: "/" + a.Export}
	if a.Network == "unix" {
		u.Scheme, u.Host = "nbd+unix", ""
		u.RawQuery = url.Values{"socket": {a.Addr}}.Encode()
	}
	return u.String()
}
