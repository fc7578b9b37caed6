package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"
)

const (
	maxReply    = 16 << 20 // bytes
	dialLimit   = 5 * time.Second
	answerLimit = writeLimit + 5*time.Second // a little more than the server takes at most
)

// A Client asks a daemon. All methods may be called at the same time. Besides a *Error they return what went wrong
// before there was an answer.
type Client struct {
	socket string
	http   *http.Client
}

// Dial finds a daemon: the first of the sockets (see Sockets) on which somebody listens. If none does, the error
// matches ErrNoDaemon and says what was found at each.
func Dial(ctx context.Context, sockets []string) (*Client, error) {
	var found []string
	for _, path := range sockets {
		err := checkPath(path)
		if err == nil {
			var c net.Conn
			if c, err = dial(ctx, path); err == nil {
				c.Close()
				return newClient(path), nil
			}
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("control socket %s: %w", path, ctx.Err())
		}
		found = append(found, path+": "+reason(err))
	}
	return nil, fmt.Errorf("%w (%s)", ErrNoDaemon, strings.Join(found, "; "))
}

func dial(ctx context.Context, path string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialLimit}
	return d.DialContext(ctx, "unix", path)
}

// reason is what a failed dial means here.
func reason(err error) string {
	var errno syscall.Errno
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "left by a daemon that is gone"
	case errors.Is(err, syscall.ENOTSOCK):
		return "not a socket"
	case errors.As(err, &errno):
		return errno.Error()
	}
	return err.Error()
}

func newClient(path string) *Client {
	t := &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx, path) },
		MaxIdleConns:           1,
		IdleConnTimeout:        idleLimit / 2, // before the server's end
		MaxResponseHeaderBytes: maxHeader,
		DisableCompression:     true,
	}
	return &Client{path, &http.Client{
		Transport: t, Timeout: answerLimit,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Close releases the connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Socket is the path of the daemon's socket.
func (c *Client) Socket() string { return c.socket }

// Status returns what the daemon serves and counts.
func (c *Client) Status(ctx context.Context) (*Status, error) {
	s := new(Status)
	if err := c.do(ctx, "GET", "/v1/status", nil, nil, s); err != nil {
		return nil, err
	}
	return s, nil
}

// StatusJSON returns the same, and as the daemon sent it: with what this version does not know.
func (c *Client) StatusJSON(ctx context.Context) (*Status, json.RawMessage, error) {
	var raw json.RawMessage
	if err := c.do(ctx, "GET", "/v1/status", nil, nil, &raw); err != nil {
		return nil, nil, err
	}
	s := new(Status)
	if err := decodeReply(http.StatusOK, raw, s); err != nil {
		return nil, nil, fmt.Errorf("control socket %s: %w", c.socket, err)
	}
	return s, raw, nil
}

// Objects lists what has attributes: "set", "cache", and the names of the volumes.
func (c *Client) Objects(ctx context.Context) ([]string, error) {
	var r objectsReply
	err := c.do(ctx, "GET", "/v1/objects", nil, nil, &r)
	return r.Objects, err
}

// Attributes lists the attributes of an object.
func (c *Client) Attributes(ctx context.Context, object string) ([]Attribute, error) {
	var r attributesReply
	err := c.do(ctx, "GET", "/v1/attributes", url.Values{"object": {object}}, nil, &r)
	return r.Attributes, err
}

// Attribute returns the value of an attribute.
func (c *Client) Attribute(ctx context.Context, object, name string) (string, error) {
	var r valueReply
	err := c.do(ctx, "GET", "/v1/attribute", url.Values{"object": {object}, "name": {name}}, nil, &r)
	return r.Value, err
}

// SetAttribute sets an attribute, and returns its value afterwards: "" for those that can only be written.
func (c *Client) SetAttribute(ctx context.Context, object, name, value string) (string, error) {
	if !utf8.ValidString(value) {
		return "", fmt.Errorf("%s of %s: the value %q is not UTF-8", name, object, value)
	}
	var r valueReply
	err := c.do(ctx, "PUT", "/v1/attribute", url.Values{"object": {object}, "name": {name}}, valueRequest{&value}, &r)
	return r.Value, err
}

// do sends one request and decodes the reply. The path is as it is in a URL.
func (c *Client) do(ctx context.Context, method, path string, params url.Values, body, to any) error {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	plain, err := url.PathUnescape(path)
	if err != nil {
		return err
	}
	u := url.URL{Scheme: "http", Host: "ubcache", Path: plain, RawPath: path, RawQuery: params.Encode()}
	r, err := http.NewRequestWithContext(ctx, method, u.String(), bytes.NewReader(text))
	if err != nil {
		return err
	}
	reply, err := c.http.Do(r)
	if err != nil {
		return c.failure(ctx, err)
	}
	defer reply.Body.Close()
	content, err := io.ReadAll(io.LimitReader(reply.Body, maxReply+1))
	if err != nil {
		return c.failure(ctx, err)
	}
	if err := decodeReply(reply.StatusCode, content, to); err != nil {
		var e *Error
		if errors.As(err, &e) {
			return err
		}
		return fmt.Errorf("control socket %s: %w", c.socket, err)
	}
	return nil
}

// failure names the socket in an error of the transport, without the URL.
func (c *Client) failure(ctx context.Context, err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case os.IsTimeout(err):
		err = fmt.Errorf("%w: no answer within %v", ErrTimeout, answerLimit)
	}
	return fmt.Errorf("control socket %s: %w", c.socket, err)
}

// decodeReply takes a reply apart: into to, or an error, a *Error if the daemon sent one.
func decodeReply(status int, content []byte, to any) error {
	if len(content) > maxReply {
		return fmt.Errorf("the answer has more than %d bytes", maxReply)
	}
	if status == http.StatusOK {
		if err := json.Unmarshal(content, to); err != nil {
			return fmt.Errorf("the answer is not what was asked for: %w", err)
		}
		return nil
	}
	var r errorReply
	if err := json.Unmarshal(content, &r); err != nil || r.Error == nil || r.Error.Message == "" {
		return fmt.Errorf("who answers is no ubcache daemon: HTTP status %d", status)
	}
	return r.Error
}
