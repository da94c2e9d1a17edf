//! Keys: read, listed by prefix, written, deleted, changed in transactions, forgotten.

use crate::api::kv_client::KvClient;
use crate::api::{self, compare, request_op};
use crate::connect::{Client, Error};

impl Client {
    /// The record under `key`, if there is one.
    ///
    /// # Errors
    /// Whatever etcd or the connection says; likewise below.
    pub async fn get(&self, key: impl Into<Vec<u8>>) -> Result<Option<api::KeyValue>, Error> {
        let request = api::RangeRequest {
            key: key.into(),
            ..api::RangeRequest::default()
        };
        let found = self.call(request, async |link, request| {
            KvClient::new(link).range(request).await
        });
        Ok(found.await?.kvs.pop())
    }

    /// All records whose keys begin with `prefix`, in an answer of at most `bytes_max`.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn list(
        &self,
        prefix: impl Into<Vec<u8>>,
        bytes_max: usize,
    ) -> Result<api::RangeResponse, Error> {
        let key = prefix.into();
        let request = api::RangeRequest {
            range_end: prefix_end(&key),
            key,
            ..api::RangeRequest::default()
        };
        let found = self.call(request, async |link, request| {
            let mut keys = KvClient::new(link).max_decoding_message_size(bytes_max);
            keys.range(request).await
        });
        found.await
    }

    /// Writes a record that no lease ends; returns the store's revision.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn put(
        &self,
        key: impl Into<Vec<u8>>,
        value: impl Into<Vec<u8>>,
    ) -> Result<i64, Error> {
        let put = under_lease(key, value, 0);
        let stored = self.call(put, async |link, put| KvClient::new(link).put(put).await);
        Ok(revision(stored.await?.header))
    }

    /// Deletes a record; whether there was one.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn delete(&self, key: impl Into<Vec<u8>>) -> Result<bool, Error> {
        let request = deletion(key);
        let deleted = self.call(request, async |link, request| {
            KvClient::new(link).delete_range(request).await
        });
        Ok(deleted.await?.deleted > 0)
    }

    /// Writes `put` if every one of `conditions` holds; whether they did.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn put_if(
        &self,
        conditions: Vec<api::Compare>,
        put: api::PutRequest,
    ) -> Result<bool, Error> {
        self.change_if(conditions, request_op::Request::RequestPut(put))
            .await
    }

    /// Deletes the record under `key` if every one of `conditions` holds; whether they did.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn delete_if(
        &self,
        conditions: Vec<api::Compare>,
        key: impl Into<Vec<u8>>,
    ) -> Result<bool, Error> {
        let delete = request_op::Request::RequestDeleteRange(deletion(key));
        self.change_if(conditions, delete).await
    }

    async fn change_if(
        &self,
        compare: Vec<api::Compare>,
        change: request_op::Request,
    ) -> Result<bool, Error> {
        let request = api::TxnRequest {
            compare,
            success: vec![api::RequestOp {
                request: Some(change),
            }],
            failure: Vec::new(),
        };
        let done = self.call(request, async |link, request| {
            KvClient::new(link).txn(request).await
        });
        Ok(done.await?.succeeded)
    }

    /// Forgets all history before `revision`; `physical` waits until the disk has as well.
    ///
    /// # Errors
    /// As [`Client::get`].
    pub async fn compact(&self, revision: i64, physical: bool) -> Result<(), Error> {
        let request = api::CompactionRequest { revision, physical };
        let compacted = self.call(request, async |link, request| {
            KvClient::new(link).compact(request).await
        });
        compacted.await.map(drop)
    }
}

fn deletion(key: impl Into<Vec<u8>>) -> api::DeleteRangeRequest {
    api::DeleteRangeRequest {
        key: key.into(),
        ..api::DeleteRangeRequest::default()
    }
}

fn revision(header: Option<api::ResponseHeader>) -> i64 {
    header.map_or(0, |header| header.revision)
}

/// A record that ends with `lease`, or with none if that is 0.
pub fn under_lease(
    key: impl Into<Vec<u8>>,
    value: impl Into<Vec<u8>>,
    lease: i64,
) -> api::PutRequest {
    api::PutRequest {
        key: key.into(),
        value: value.into(),
        lease,
        ..api::PutRequest::default()
    }
}

/// That `key` was written last at `revision`; 0 is that there is none.
pub fn unchanged_since(key: impl Into<Vec<u8>>, revision: i64) -> api::Compare {
    let target = compare::TargetUnion::ModRevision(revision);
    equal(key, compare::CompareTarget::Mod, target)
}

/// That `key` ends with `lease`.
pub fn ends_with(key: impl Into<Vec<u8>>, lease: i64) -> api::Compare {
    let target = compare::TargetUnion::Lease(lease);
    equal(key, compare::CompareTarget::Lease, target)
}

fn equal(
    key: impl Into<Vec<u8>>,
    what: compare::CompareTarget,
    value: compare::TargetUnion,
) -> api::Compare {
    api::Compare {
        result: compare::CompareResult::Equal as i32,
        target: what as i32,
        key: key.into(),
        target_union: Some(value),
        ..api::Compare::default()
    }
}

/// The first key after all that begin with `prefix`, as etcd wants ranges to end. A prefix that
/// has no such key (it is empty, or nothing but 0xff) ends nowhere, which etcd calls `\0`.
pub fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if let Some(next) = last.checked_add(1) {
            end.push(next);
            return end;
        }
    }
    vec![0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_at_the_first_key_that_does_not_begin_with_it() {
        assert_eq!(prefix_end(b"/a/"), b"/a0");
        assert_eq!(prefix_end(b"a\xff\xff"), b"b");
        assert_eq!(prefix_end(b"\xff"), b"\0");
        assert_eq!(prefix_end(b""), b"\0");
    }
}
