package control

import (
	"context"
	"net/url"
)

// A FlashVolume is a volume whose data lies in the cache alone.
type FlashVolume struct {
	Slot        Number   `json:"slot,omitzero"` // by which it can be named too, as long as that is nobody's label
	Label       string   `json:"label"`         // empty: it has none
	SizeBytes   Number   `json:"size_bytes,omitzero"`
	DirtyBytes  Number   `json:"dirty_bytes,omitzero"` // what it holds: all of that is nowhere else
	Volume      string   `json:"volume,omitempty"`     // its name as a volume that is served; empty: it is not
	NBD         []string `json:"nbd,omitempty"`        // URIs
	Connections Number   `json:"connections,omitzero"`
}

// FlashVolumes lists the flash-only volumes of the set, those too that are not served.
func (c *Client) FlashVolumes(ctx context.Context) ([]FlashVolume, error) {
	var r flashReply
	err := c.do(ctx, "GET", "/v1/flash", nil, nil, &r)
	return r.Flash, err
}

// CreateFlash makes a flash-only volume of so many bytes, and serves it under its label.
func (c *Client) CreateFlash(ctx context.Context, label string, size int64) (*FlashVolume, error) {
	return c.flash(ctx, "POST", "/v1/flash", nil, flashRequest{&label, &size})
}

// GrowFlash makes a flash-only volume larger. Connections that exist keep the size that they were told.
func (c *Client) GrowFlash(ctx context.Context, name string, size int64) (*FlashVolume, error) {
	return c.flash(ctx, "PATCH", flashPath(name), nil, sizeRequest{&size})
}

// DeleteFlash takes a flash-only volume and its data away, and returns what it was. While clients are connected the
// error matches ErrConnected, unless force ends their connections.
func (c *Client) DeleteFlash(ctx context.Context, name string, force bool) (*FlashVolume, error) {
	var params url.Values
	if force {
		params = url.Values{"force": {"1"}}
	}
	return c.flash(ctx, "DELETE", flashPath(name), params, nil)
}

func flashPath(name string) string { return "/v1/flash/" + url.PathEscape(name) }

func (c *Client) flash(ctx context.Context, method, path string, params url.Values, body any) (*FlashVolume, error) {
	f := new(FlashVolume)
	if err := c.do(ctx, method, path, params, body, f); err != nil {
		return nil, err
	}
	return f, nil
}

func (s *Server) createFlash(r *request) (any, error) {
	var q flashRequest
	const form = `{"label": "TEXT", "size": BYTES}`
	if err := r.content(form, &q); err != nil {
		return nil, err
	}
	if q.Label == nil || q.Size == nil || *q.Size <= 0 {
		return nil, errorf(ErrBadRequest, "the body is not %s: both are needed, and a size is above 0", form)
	}
	return s.backend.CreateFlash(r.Context(), *q.Label, *q.Size)
}

func (s *Server) growFlash(r *request) (any, error) {
	var q sizeRequest
	const form = `{"size": BYTES}`
	if err := r.content(form, &q); err != nil {
		return nil, err
	}
	if q.Size == nil || *q.Size <= 0 {
		return nil, errorf(ErrBadRequest, "the body is not %s: a size is above 0", form)
	}
	return s.backend.GrowFlash(r.Context(), r.name, *q.Size)
}

func (s *Server) deleteFlash(r *request) (any, error) {
	if err := r.empty(); err != nil {
		return nil, err
	}
	return s.backend.DeleteFlash(r.Context(), r.name, r.flags["force"])
}
