//! The values of the flags of `serve`, as texts.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::config::parse_bytes;
use crate::request::MAX_LOGPROBS;

/// A time in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Seconds(pub Duration);

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Seconds, String> {
        let seconds: f64 =
            text.parse().map_err(|_| "seconds are a number, 0 or more".to_owned())?;
        let time = Duration::try_from_secs_f64(seconds);
        // A year: what is added to a point in time must not overflow.
        let time = time.ok().filter(|time| time.as_secs() <= 366 * 24 * 3600);
        time.map(Seconds).ok_or_else(|| "seconds are a number from 0 to a year's".to_owned())
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.as_secs_f64())
    }
}

/// A number of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Bytes(pub usize);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Bytes, String> {
        let bytes = parse_bytes(text)?;
        if bytes == 0 { Err("no request fits in 0 bytes".to_owned()) } else { Ok(Bytes(bytes)) }
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes.is_multiple_of(1 << 20) => write!(f, "{}MiB", bytes >> 20),
            bytes => write!(f, "{bytes}"),
        }
    }
}

/// Seconds that a limit of time is: there is none that is over at once, and none that never is.
pub fn parse_some_time(text: &str) -> Result<Seconds, String> {
    let time: Seconds = text.parse()?;
    if time.0.is_zero() {
        return Err("above 0: with 0 the time would be over at once".to_owned());
    }
    Ok(time)
}

/// A number that is not 0.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| "a whole number, 1 or more".to_owned())
}

/// A number of connections: no more than a semaphore of the runtime can count.
pub fn connections(text: &str) -> Result<usize, String> {
    at_least_one(text).map(|number| number.min(usize::MAX >> 3))
}

/// A number of alternatives.
pub fn parse_logprobs(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number <= MAX_LOGPROBS);
    number.ok_or_else(|| format!("0 to {MAX_LOGPROBS}"))
}

/// An origin as browsers send it: a scheme and a host, perhaps a port, and nothing behind.
pub fn parse_origin(text: &str) -> Result<String, String> {
    let host = text.split_once("://").map(|(_, host)| host);
    let is_origin = host.is_some_and(|host| {
        let mut bytes = host.bytes();
        !host.is_empty() && bytes.all(|byte| byte.is_ascii_graphic() && byte != b'/')
    });
    if text == "*" || is_origin {
        // Browsers send it so.
        return Ok(text.to_ascii_lowercase());
    }
    Err("an origin is a scheme and a host, https://example.org, or * for all".to_owned())
}

/// A name or an address as it stands in a Host header, without the port: that is not compared.
pub fn parse_host(text: &str) -> Result<String, String> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let is_address = bare.parse::<std::net::Ipv6Addr>().is_ok();
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if is_address || (!bare.is_empty() && bare == text && bare.bytes().all(is_part)) {
        return Ok(bare.to_owned());
    }
    Err("a name or an address alone, without scheme, port or *: foo.example".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_without_a_port() {
        for (text, host) in [
            ("foo.example", "foo.example"),
            ("10.0.0.1", "10.0.0.1"),
            ("[::1]", "::1"),
            ("::1", "::1"),
        ] {
            assert_eq!(parse_host(text).as_deref(), Ok(host));
        }
        for wrong in ["", "foo.example:80", "http://foo.example", "*", "*.example", "[foo]", "a b"]
        {
            assert!(parse_host(wrong).is_err(), "{wrong}");
        }
    }
}
