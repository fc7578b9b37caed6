package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Backend is what a Server answers for. All methods may be called at the same time. Errors that are a *Error are
// answered as they are, others as ErrFailed, or as ErrTimeout if that is what they say.
type Backend interface {
	// Status takes milliseconds, whatever the size of the cache.
	Status(ctx context.Context) (*Status, error)
	Objects(ctx context.Context) ([]string, error)
	Attributes(ctx context.Context, object string) ([]Attribute, error)
	Attribute(ctx context.Context, object, name string) (string, error)
	SetAttribute(ctx context.Context, object, name, value string) error

	// StartJob starts a job, or finds one of that kind that runs; it does not wait for its end. Job returns the last job
	// of a volume. CancelJob ends the one that runs, waits for that, and returns the last one.
	StartJob(ctx context.Context, volume, kind string) (*Job, error)
	Job(ctx context.Context, volume string) (*Job, error)
	CancelJob(ctx context.Context, volume string) (*Job, error)

	// FlashVolumes lists all of the set. The others change one, and return it as it is then, or was; name is its label
	// or its slot.
	FlashVolumes(ctx context.Context) ([]FlashVolume, error)
	CreateFlash(ctx context.Context, label string, size int64) (*FlashVolume, error)
	GrowFlash(ctx context.Context, name string, size int64) (*FlashVolume, error)
	DeleteFlash(ctx context.Context, name string, force bool) (*FlashVolume, error)
}

// Limits of a server. A client that keeps to none of them holds one connection, for a bounded time.
const (
	maxBody    = 64 << 10 // bytes of a request's body
	maxHeader  = 16 << 10 // bytes of its head
	maxConns   = 64       // more wait
	readLimit  = 5 * time.Second
	workLimit  = 30 * time.Second // of a Backend's method
	idleLimit  = 30 * time.Second
	writeLimit = workLimit + 10*time.Second
)

// A Server answers requests. Log, if not nil, hears of what fails inside.
type Server struct {
	backend Backend
	http    *http.Server
	slots   chan struct{} // one for each connection
	done    chan struct{} // closed by Shutdown
	once    sync.Once
}

// NewServer makes a server. Shutdown releases it.
func NewServer(b Backend, log *slog.Logger) *Server {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{backend: b, slots: make(chan struct{}, maxConns), done: make(chan struct{})}
	s.http = &http.Server{
		Handler: s, ReadTimeout: readLimit, WriteTimeout: writeLimit, IdleTimeout: idleLimit, MaxHeaderBytes: maxHeader,
		DisableGeneralOptionsHandler: true, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	return s
}

// Serve answers connections from l, which it closes in the end, until Shutdown.
func (s *Server) Serve(l net.Listener) error {
	err := s.http.Serve(&limited{l, s.slots, s.done})
	select {
	case <-s.done:
		return nil
	default:
		return err
	}
}

// Shutdown closes the listeners and waits until the requests in flight are answered. When ctx ends first, the
// connections are closed and ctx's error is returned.
func (s *Server) Shutdown(ctx context.Context) error {
	s.once.Do(func() { close(s.done) })
	err := s.http.Shutdown(ctx)
	if err != nil {
		s.http.Close()
	}
	return err
}

// limited lets only so many connections be open at a time.
type limited struct {
	net.Listener
	slots, done chan struct{}
}

func (l *limited) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.done:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &slotConn{Conn: c, slots: l.slots}, nil
}

type slotConn struct {
	net.Conn
	slots chan struct{}
	once  sync.Once
}

func (c *slotConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { <-c.slots })
	return err
}

// An endpoint is a path of version 1.
type endpoint struct {
	path  string // {name} stands for one part of any content
	calls []call // in the order in which they are told
}

// A call is what a method does at an endpoint.
type call struct {
	method string
	params []string // all must be given, once
	flags  []string // may be given, once, as 1 or 0
	work   func(s *Server, r *request) (any, error)
}

// A request is what a call is told.
type request struct {
	*http.Request
	name   string          // what stands for {name}
	params []string        // the values of the call's params
	flags  map[string]bool // those of its flags that are 1
}

var endpoints = []endpoint{
	{"/v1/status", []call{{method: "GET", work: func(s *Server, r *request) (any, error) {
		return s.backend.Status(r.Context())
	}}}},
	{"/v1/objects", []call{{method: "GET", work: func(s *Server, r *request) (any, error) {
		list, err := s.backend.Objects(r.Context())
		return objectsReply{list}, err
	}}}},
	{"/v1/attributes", []call{{method: "GET", params: []string{"object"}, work: func(s *Server, r *request) (any, error) {
		list, err := s.backend.Attributes(r.Context(), r.params[0])
		return attributesReply{list}, err
	}}}},
	{"/v1/attribute", []call{
		{method: "GET", params: []string{"object", "name"}, work: func(s *Server, r *request) (any, error) {
			value, err := s.backend.Attribute(r.Context(), r.params[0], r.params[1])
			return valueReply{value}, err
		}},
		{method: "PUT", params: []string{"object", "name"}, work: (*Server).setAttribute},
	}},
	{"/v1/volumes/{name}/flush", []call{{method: "POST", work: startJob(Flush)}}},
	{"/v1/volumes/{name}/detach", []call{{method: "POST", work: startJob(Detach)}}},
	{"/v1/volumes/{name}/cancel", []call{{method: "POST", work: (*Server).cancelJob}}},
	{"/v1/volumes/{name}/job", []call{{method: "GET", work: func(s *Server, r *request) (any, error) {
		return s.backend.Job(r.Context(), r.name)
	}}}},
	{"/v1/flash", []call{
		{method: "GET", work: func(s *Server, r *request) (any, error) {
			list, err := s.backend.FlashVolumes(r.Context())
			return flashReply{list}, err
		}},
		{method: "POST", work: (*Server).createFlash},
	}},
	{"/v1/flash/{name}", []call{
		{method: "PATCH", work: (*Server).growFlash},
		{method: "DELETE", flags: []string{"force"}, work: (*Server).deleteFlash},
	}},
}

func (s *Server) setAttribute(r *request) (any, error) {
	var v valueRequest
	const form = `{"value": "TEXT"}`
	if err := r.content(form, &v); err != nil {
		return nil, err
	}
	if v.Value == nil {
		return nil, errorf(ErrBadRequest, "the body is not %s: value is missing", form)
	}
	if err := s.backend.SetAttribute(r.Context(), r.params[0], r.params[1], *v.Value); err != nil {
		return nil, err
	}
	// What can only be written has no value to answer with.
	value, _ := s.backend.Attribute(r.Context(), r.params[0], r.params[1])
	return valueReply{value}, nil
}

// body returns the content of a request.
func (r *request) body() ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxBody))
	if err != nil {
		return nil, errorf(ErrBadRequest, "the body cannot be read, or has more than %d bytes: %v", maxBody, err)
	}
	return body, nil
}

// empty refuses a body where none is wanted: it would say what else is to be done.
func (r *request) empty() error {
	body, err := r.body()
	if err == nil && len(body) > 0 {
		err = errorf(ErrBadRequest, "there is a body, and none is wanted")
	}
	return err
}

// content decodes the body, which is to have a form: the fields of to, and no others.
func (r *request) content(form string, to any) error {
	body, err := r.body()
	if err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return errorf(ErrBadRequest, "the body is not %s: %v", form, err)
	}
	if _, err := d.Token(); err != io.EOF {
		return errorf(ErrBadRequest, "more follows after %s", form)
	}
	return nil
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), workLimit)
	defer cancel()
	status := http.StatusOK
	reply, err := s.answer(r.WithContext(ctx), w.Header())
	if err != nil {
		e := toError(err)
		reply, status = errorReply{e}, e.status()
		if errors.Is(e, ErrUnknownRequest) && w.Header().Get("Allow") != "" {
			status = http.StatusMethodNotAllowed
		}
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(reply); err != nil {
		status = http.StatusInternalServerError
		b.Reset()
		enc.Encode(errorReply{errorf(ErrFailed, "the answer has no JSON form: %v", err)})
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(b.Bytes())
}

// answer finds out what a request wants. On a method that is not known it sets Allow.
func (s *Server) answer(r *http.Request, header http.Header) (any, error) {
	var e *endpoint
	var name string
	for i := range endpoints {
		if part, ok := endpoints[i].match(r.URL.EscapedPath()); ok {
			e, name = &endpoints[i], part
		}
	}
	if e == nil {
		return nil, unknownPath(r.URL.Path)
	}
	i := slices.IndexFunc(e.calls, func(c call) bool { return c.method == r.Method })
	if i < 0 {
		var methods []string
		for _, c := range e.calls {
			methods = append(methods, c.method)
		}
		header.Set("Allow", strings.Join(methods, ", "))
		u := errorf(ErrUnknownRequest, "%s takes %s, not %q", e.path, strings.Join(methods, " and "), r.Method)
		u.Known = methods
		return nil, u
	}
	c := &e.calls[i]
	params, flags, err := c.parse(e.path, r.URL.RawQuery)
	if err != nil {
		return nil, err
	}
	return c.work(s, &request{r, name, params, flags})
}

// match reports whether a path, as it is in a URL, is the endpoint's, and what stands for {name} then.
func (e *endpoint) match(path string) (name string, ok bool) {
	want, parts := strings.Split(e.path, "/"), strings.Split(path, "/")
	if len(want) != len(parts) {
		return "", false
	}
	for i, part := range parts {
		text, err := url.PathUnescape(part)
		switch {
		case err != nil:
			return "", false
		case want[i] == "{name}":
			name = text
		case want[i] != text:
			return "", false
		}
	}
	return name, true
}

// parse returns the values of a call's parameters in their order, and which of its flags are set.
func (c *call) parse(path, query string) ([]string, map[string]bool, error) {
	fail := func(format string, args ...any) ([]string, map[string]bool, error) {
		want := "none"
		switch {
		case len(c.params) > 0:
			want = strings.Join(c.params, " and ") + ", each once"
		case len(c.flags) > 0:
			want = "none, or " + strings.Join(c.flags, " and ") + ", each 1 or 0"
		}
		b := errorf(ErrBadRequest, "parameters of %s: %s; want %s", path, fmt.Sprintf(format, args...), want)
		b.Known = slices.Concat(c.params, c.flags)
		return nil, nil, b
	}
	q, err := url.ParseQuery(query)
	if err != nil {
		return fail("%v", err)
	}
	flags := map[string]bool{}
	for name, values := range q {
		switch {
		case slices.Contains(c.params, name):
		case !slices.Contains(c.flags, name):
			return fail("%q is not known", name)
		case len(values) != 1 || values[0] != "0" && values[0] != "1":
			return fail("%s is %q", name, values)
		default:
			flags[name] = values[0] == "1"
		}
	}
	params := make([]string, len(c.params))
	for i, name := range c.params {
		if len(q[name]) != 1 {
			return fail("%s is given %d times", name, len(q[name]))
		}
		params[i] = q[name][0]
	}
	return params, flags, nil
}

// unknownPath says what is known instead of a path.
func unknownPath(path string) *Error {
	if !strings.HasPrefix(path, "/v1/") {
		e := errorf(ErrUnknownRequest, "%q is not known: this daemon speaks version 1, whose paths begin with /v1/", path)
		e.Known = []string{"/v1/"}
		return e
	}
	e := errorf(ErrUnknownRequest, "%q is not known", path)
	for i := range endpoints {
		e.Known = append(e.Known, endpoints[i].path)
	}
	e.Message += "; there are: " + strings.Join(e.Known, ", ")
	return e
}
