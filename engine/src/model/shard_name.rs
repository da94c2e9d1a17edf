//! How the files of a model that is split are named: `STEM-00002-of-00003`.

/// A file's name without its ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardName<'a> {
    pub stem: &'a str,
    /// From 1 on, at most `count`.
    pub number: u32,
    pub count: u32,
}

impl<'a> ShardName<'a> {
    /// `None` for the name of a file that is not a shard.
    pub fn parse(name: &'a str) -> Option<Self> {
        let (rest, count) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let (number, count) = (digits(number)?, digits(count)?);
        (!stem.is_empty() && (1..=count).contains(&number)).then_some(Self {
            stem,
            number,
            count,
        })
    }

    /// The name of another shard of the same model.
    pub fn of(self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}", self.stem, self.count)
    }
}

/// Five digits, as every tool writes them.
fn digits(text: &str) -> Option<u32> {
    (text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit()))
        .then(|| text.parse().ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::ShardName;

    #[test]
    fn only_numbered_names_are_shards() {
        let shard = ShardName::parse("a-b-00002-of-00003").unwrap();
        assert_eq!((shard.stem, shard.number, shard.count), ("a-b", 2, 3));
        assert_eq!(shard.of(3), "a-b-00003-of-00003");
        for other in [
            "model",
            "a-00000-of-00003",
            "a-00004-of-00003",
            "a-2-of-3",
            "a-00002-of-0000x",
            "-00001-of-00001",
            "00001-of-00001",
            "a-+0001-of-00001",
        ] {
            assert_eq!(ShardName::parse(other), None, "{other}");
        }
    }
}
