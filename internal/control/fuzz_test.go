package control

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
)

// Whatever is asked, the answer is JSON: what was asked for, or an Error with a text.
func FuzzRequest(f *testing.F) {
	for _, e := range endpoints {
		for _, c := range e.calls {
			f.Add(c.method, strings.Replace(e.path, "{name}", "set", 1), "object=set&name=congested", "")
		}
	}
	f.Add("POST", "/v1/volumes/a%2fb/flush", "", "")
	f.Add("POST", "/v1/flash", "", `{"label": "x", "size": 1073741824}`)
	f.Add("DELETE", "/v1/flash/x", "force=1", "")
	f.Add("PUT", "/v1/attribute", "object=set&name=trigger_gc", `{"value": "1"}`)
	f.Add("PUT", "/v1/attribute", "object=set&name=trigger_gc", `{"value": null, "x": [[[]]]}`)
	f.Add("POST", "/v2/x", "%zz;a=b", "{")
	f.Fuzz(func(t *testing.T, method, path, query, body string) {
		h := NewServer(newFake(), nil)
		r := httptest.NewRequest("GET", "/", strings.NewReader(body))
		r.Method, r.URL = method, &url.URL{Path: path, RawQuery: query}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		var to any
		err := decodeReply(w.Code, w.Body.Bytes(), &to)
		if w.Code == http.StatusOK {
			if err != nil {
				t.Fatal(err)
			}
			return
		}
		var e *Error
		if !errors.As(err, &e) || e.Message == "" || e.status() != w.Code && w.Code != http.StatusMethodNotAllowed {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
	})
}

// Whatever is answered, a client gets a status that it can write again, or an error with a text.
func FuzzReply(f *testing.F) {
	s := newFake().status
	s.Volumes = []Volume{{Name: "v"}}
	s.Total = Sum(s.Volumes)
	text, _ := json.Marshal(s)
	f.Add(200, text)
	f.Add(404, []byte(`{"error": {"code": "no-object", "message": "m", "known": ["a"]}}`))
	f.Add(200, []byte(`{"set": {"bucket_bytes": 1e3, "buckets": []}}`))
	f.Add(500, []byte(`{"error": null}`))
	f.Fuzz(func(t *testing.T, status int, content []byte) {
		var s Status
		if err := decodeReply(status, content, &s); err != nil {
			if err.Error() == "" {
				t.Fatal("an error without a text")
			}
			return
		}
		Sum(s.Volumes)
		if _, err := json.Marshal(&s); err != nil {
			t.Fatal(err)
		}
	})
}
