// Package control is the daemon's socket: HTTP and JSON over a Unix socket that only its owner may use. Server
// answers over a Backend, Client asks; both speak version 1:
//
//	GET /v1/status                             Status: the set, each volume, their sum
//	GET /v1/objects                            {"objects": ["set", "cache", NAME...]}
//	GET /v1/attributes?object=OBJECT           {"attributes": [{"name", "value", "writable"}...]}
//	GET /v1/attribute?object=OBJECT&name=NAME  {"value"}
//	PUT /v1/attribute?object=OBJECT&name=NAME  {"value"} -> {"value"}, as it is now
//	POST /v1/volumes/NAME/flush, .../detach    Job, started or found running
//	GET /v1/volumes/NAME/job                   Job, the last one of the volume
//	POST /v1/volumes/NAME/cancel               Job, ended if one was running
//	GET /v1/flash                              {"flash": [FlashVolume...]}
//	POST /v1/flash                             {"label", "size"} -> FlashVolume, which is served
//	PATCH /v1/flash/NAME                       {"size"} -> FlashVolume
//	DELETE /v1/flash/NAME[?force=1]            FlashVolume, as it was
//
// A request that fails is answered with {"error": Error}; the client returns that Error. Whoever reads replies
// ignores fields that it does not know, and takes one that is missing for "not told", never for 0. Whoever answers
// refuses fields that it does not know: they would change what is done. From a shell:
//
//	curl --unix-socket /run/ubcache/control.sock 'http://ubcache/v1/attribute?object=data&name=cache_mode'
//
// The package knows the protocol and nothing else, so that any program can be a client.
package control
