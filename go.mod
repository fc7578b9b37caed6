module github.com/ubcache/ubcache

go 1.26
